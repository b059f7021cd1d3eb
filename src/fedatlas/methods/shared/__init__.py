"""What several methods need. A paper has its file one level up; nothing here is a method."""
