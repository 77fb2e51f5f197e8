"""The commands of gyre, one thin file each; nothing imports them."""
