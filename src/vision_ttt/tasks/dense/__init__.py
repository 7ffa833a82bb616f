"""What tasks with dense models share: detection and segmentation."""
