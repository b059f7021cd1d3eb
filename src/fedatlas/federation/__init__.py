"""A federation from its file to its run: tasks, design, checks, sessions, sites, deployment, and trained models."""
