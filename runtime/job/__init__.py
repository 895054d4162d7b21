"""One file for a job: data, plan, training and storage; run here, or written for another system."""
