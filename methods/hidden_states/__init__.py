"""Code shared by EAGLE-3, DFlash and MTP, which draft over the target's hidden states; not a method."""
