"""Names that code written for detectron2 imports, and that trainkit itself does not use."""
