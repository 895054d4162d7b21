"""What a run reads: text, images, the teaching data, and the order in which it is read."""
