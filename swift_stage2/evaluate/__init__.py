"""Standard metrics of a detector: rows and predictions in; a table, JSON and a page with intervals out.

`data` reads rows and predictions, and computes the metrics.

served_model the server that is asked: a running one, or our own
asking       its answers as such predictions
sections     the tables, and the worst images
command      options, files, exit status
"""
