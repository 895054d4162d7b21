"""The data of a run: text, images, the teaching data, and the order of samples."""
