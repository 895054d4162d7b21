"""Models by name, folder or function, and inputs that their forward accepts."""
