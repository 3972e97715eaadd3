"""What the connector reaches, next to its peers in the same run. Counts are checked, figures are printed."""
