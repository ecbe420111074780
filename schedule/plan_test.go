package schedule_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/schedule"
)

func TestADailySlotOverChangesOfTheClocks(t *testing.T) {
	for name, c := range map[string]struct {
		zone         string
		plan         schedule.Plan
		after        string
		want         []string
		withinOneDay bool
	}{
		"each day":                           {"Europe/Berlin", schedule.Daily(3, 0), "2026-01-30T12:00:00+01:00", []string{"2026-01-31T03:00:00+01:00", "2026-02-01T03:00:00+01:00"}, true},
		"skipped":                            {"Europe/Berlin", schedule.Daily(2, 30), "2026-03-28T12:00:00+01:00", []string{"2026-03-29T03:00:00+02:00", "2026-03-30T02:30:00+02:00"}, true},
		"after the one that is skipped":      {"Europe/Berlin", schedule.Daily(3, 30), "2026-03-28T12:00:00+01:00", []string{"2026-03-29T03:30:00+02:00"}, true},
		"twice":                              {"Europe/Berlin", schedule.Daily(2, 30), "2026-10-24T12:00:00+02:00", []string{"2026-10-25T02:30:00+02:00", "2026-10-26T02:30:00+01:00"}, true},
		"between the two":                    {"Europe/Berlin", schedule.Daily(2, 30), "2026-10-25T02:45:00+02:00", []string{"2026-10-26T02:30:00+01:00"}, true},
		"just after the clocks are set back": {"Europe/Berlin", schedule.Daily(3, 0), "2026-10-24T12:00:00+02:00", []string{"2026-10-25T03:00:00+01:00"}, true},
		"no midnight":                        {"America/Santiago", schedule.Daily(0, 0), "2026-09-05T12:00:00-04:00", []string{"2026-09-06T01:00:00-03:00", "2026-09-07T00:00:00-03:00"}, true},
		"midnight twice":                     {"America/Havana", schedule.Daily(0, 30), "2026-10-31T12:00:00-04:00", []string{"2026-11-01T00:30:00-04:00", "2026-11-02T00:30:00-05:00"}, true},
		"a change by half an hour":           {"Australia/Lord_Howe", schedule.Daily(2, 15), "2026-10-03T12:00:00+10:30", []string{"2026-10-04T02:30:00+11:00", "2026-10-05T02:15:00+11:00"}, true},
		"a date that is left out":            {"Pacific/Apia", schedule.Daily(3, 0), "2011-12-29T12:00:00-10:00", []string{"2011-12-31T03:00:00+14:00"}, false},
		"weekly":                             {"UTC", schedule.Weekly(time.Sunday, 3, 0), "2026-11-28T12:00:00Z", []string{"2026-11-29T03:00:00Z", "2026-12-06T03:00:00Z"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			in, err := time.LoadLocation(c.zone)
			require.NoError(t, err)
			at, err := time.Parse(time.RFC3339, c.after)
			require.NoError(t, err)
			at = at.In(in)
			for _, want := range c.want {
				next := c.plan.Next(at)
				require.Equal(t, want, next.Format(time.RFC3339))
				if c.withinOneDay {
					require.LessOrEqual(t, next.Sub(at), 26*time.Hour)
				}
				at = next
			}
		})
	}
}

// Ten years of days in all kinds of zones: each date has one slot, and Next does not depend on where it is asked from.
func TestADailyPlanHasOneSlotOnEachDate(t *testing.T) {
	for _, zone := range []string{"UTC", "Europe/Berlin", "America/New_York", "America/Sao_Paulo", "Australia/Lord_Howe", "Asia/Gaza", "Africa/Cairo", "America/Havana"} {
		in, err := time.LoadLocation(zone)
		require.NoError(t, err)
		for _, hour := range []int{0, 1, 2, 3, 23} {
			plan := schedule.Daily(hour, 30)
			at := plan.Next(time.Date(2016, 1, 1, 12, 0, 0, 0, in))
			for range 3650 {
				next := plan.Next(at)
				year, month, day := at.Date()
				require.Equal(t, time.Date(year, month, day+1, 0, 0, 0, 0, time.UTC).Format(time.DateOnly), next.Format(time.DateOnly), "%s at %d:30, after %v", zone, hour, at)
				require.True(t, plan.Next(next.Add(-1)).Equal(next), "%s at %d:30: %v", zone, hour, next)
				require.True(t, plan.Next(at.Add(next.Sub(at)/2)).Equal(next), "%s at %d:30: %v", zone, hour, next)
				at = next
			}
		}
	}
}

func TestATimeThatIsNoneOfADayIsRefused(t *testing.T) {
	for _, plan := range []func() schedule.Plan{
		func() schedule.Plan { return schedule.Daily(24, 0) },
		func() schedule.Plan { return schedule.Daily(3, 60) },
		func() schedule.Plan { return schedule.Weekly(7, 3, 0) },
	} {
		require.Panics(t, func() { plan() })
	}
}
