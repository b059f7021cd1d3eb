"""The report: reads a run folder, nothing else, and writes one HTML file. `page.write` is its only entrance."""
