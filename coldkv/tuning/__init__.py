"""`coldkv tune`: what a dump says about a model's channels, and the steps that spend a byte budget best."""
