"""The report: one HTML page about one run or several, without a server or the network."""
