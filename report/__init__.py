"""Results as files for people: one HTML page with plots and tables. Knows neither what was measured nor how."""
