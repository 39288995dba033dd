"""What is measured while it runs."""
