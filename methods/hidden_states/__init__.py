"""What drafts over the target's hidden states share: EAGLE-3, DFlash and MTP. Not a method of its own."""
