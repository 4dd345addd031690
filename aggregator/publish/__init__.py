"""What is given to devices: the task package, blobs, new global models."""
