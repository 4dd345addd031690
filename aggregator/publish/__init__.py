"""The task package, blobs and new global models that devices get."""
