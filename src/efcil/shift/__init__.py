"""How old statistics follow the backbone: one short file each."""
