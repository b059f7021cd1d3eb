"""Files of pixels and labels that libraries do not read as we need them."""
