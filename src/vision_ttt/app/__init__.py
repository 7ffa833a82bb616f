"""A page that shows what a model sees in a picture, for the browser (`vision-ttt app`).

`catalogue` holds the models that are offered, `uploads` and `samples` the pictures, `session`
computes, `pictures` draws, and `page` alone knows gradio.
"""
