"""Image sets as arrays: readers, the validation split, and shifted images."""
