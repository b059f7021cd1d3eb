"""What readers of several data sets share."""
