"""A batch as rows: split over devices and over time, and gathered again."""
