"""Rewards on texts: functions of users, the ready ones, and the processes in which they run. No torch here."""
