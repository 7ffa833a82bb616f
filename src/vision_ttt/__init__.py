"""Vision backbones by Test-Time Training."""
