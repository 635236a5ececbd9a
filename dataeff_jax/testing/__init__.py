"""Small problems and meshes that tests share."""
