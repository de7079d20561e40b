"""Executes plans on one device. Knows neither requests' meaning nor the scheduler."""
