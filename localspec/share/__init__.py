"""Drafts and training data to and from the Hugging Face hub: what is shared, its card, pushing, pulling, finding."""
