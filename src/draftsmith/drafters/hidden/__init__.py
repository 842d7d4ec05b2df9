"""What drafters over the target's hidden states share."""
