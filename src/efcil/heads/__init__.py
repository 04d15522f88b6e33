"""How statistics become scores: one short file each."""
