"""Why a run ended, and what to change."""
