"""The inversion attack: seeks training images in the updates that they cause.

attack    from an update to an image
views     what the server is shown of an image: raw, clipped, noised, in a sum; and how well it was found
study     of a task
show      the table, JSON and the picture
"""
