"""Figures 2 to 4 of Fed-MENU as pages of their own, and Grad-CAM of sub-encoders, which its net alone has."""
