"""Looking into files without torch: dumps, pools and single slots, down to the byte."""
