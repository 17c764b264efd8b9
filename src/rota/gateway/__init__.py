"""The HTTP side: what clients meet, and the way to the engines behind it."""
