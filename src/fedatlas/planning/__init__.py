"""From folders, or from descriptions of hospitals' folders, to a federation file, with reasons for what stands in it."""
