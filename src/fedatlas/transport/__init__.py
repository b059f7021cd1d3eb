"""How the server reaches the sites. No engine names a method; no method knows which engine it runs on."""
