"""The report: one HTML page that holds everything about one run or several, and needs neither server nor network."""
