"""How drafts are made and how many: proposers, their bounded views, and the controller of lengths."""
