"""The inversion attack: reconstructs training images from the updates that they cause.

attack    computes an image from an update
views     the server's views of an image: raw, clipped, noised, in a sum; and how well the image was found
study     the attack on a task
show      the table, JSON and the picture
"""
