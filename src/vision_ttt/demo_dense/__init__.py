"""The runs of `vision-ttt demo-dense`: what is trained on the scenes, what came out, the tables."""
