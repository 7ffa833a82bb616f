"""What tasks on images share: their data, and the models that see them."""
