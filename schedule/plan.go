package schedule

import (
	"fmt"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
)

// Plan names the times at which a job is due, its slots. The schedules of
// github.com/robfig/cron/v3 are plans, as in the [example of a cron expression]. An expression
// without CRON_TZ is in the [Config]'s Location.
//
// [example of a cron expression]: https://github.com/tenurelib/tenure/blob/main/examples/integrations/cron_test.go
type Plan interface {
	// Next returns the first slot after a time, or the zero time if there is none. The time
	// is in the [Config]'s Location, never in that of the host. The slots do not depend on the
	// time: [New] refuses a plan that counts from it, as @every of robfig/cron does.
	Next(after time.Time) time.Time
}

// Interval returns the plan whose slots are all multiples of an interval, plus a phase, since midnight UTC on 1
// January 1970. For example, Interval(24*time.Hour, 3*time.Hour) is daily at 03:00 UTC, whenever the program
// was started. It panics if the interval is not positive, or if one of the two lacks its unit.
func Interval(interval, phase time.Duration) Plan {
	if interval <= 0 {
		panic(fmt.Sprintf("schedule: Interval: interval %v is not positive", interval))
	}
	for name, d := range map[string]time.Duration{"interval": interval, "phase": max(phase, -phase)} {
		if err := objects.ValidDuration(name, d, "time.Hour"); err != nil {
			panic(fmt.Sprintf("schedule: Interval: %v", err))
		}
	}
	return every{interval, phase}
}

type every struct{ interval, phase time.Duration }

func (p every) Next(after time.Time) time.Time {
	// Not Truncate, which counts from the year 1, a Monday: a week would begin then.
	epoch := time.Unix(0, 0).Add(p.phase)
	since := after.Sub(epoch)
	n := since / p.interval
	if since < 0 && since%p.interval != 0 {
		n--
	}
	return epoch.Add((n + 1) * p.interval).UTC()
}

// Daily returns the plan that has a slot on each day at a time of day, in the [Config]'s Location. Where clocks are
// set ahead over that time, the slot is at the moment at which they are; where they are set back over it, the slot is
// the first of the two. It panics if the time is none of a day.
func Daily(hour, minute int) Plan { return newDaily(everyDay, hour, minute) }

// Weekly returns the plan that has the slots of [Daily] on one day of the week only.
func Weekly(day time.Weekday, hour, minute int) Plan {
	if day < time.Sunday || day > time.Saturday {
		panic(fmt.Sprintf("schedule: Weekly: day %d is none of the week", day))
	}
	return newDaily(day, hour, minute)
}

const everyDay time.Weekday = -1

type daily struct {
	day          time.Weekday
	hour, minute int
}

func newDaily(day time.Weekday, hour, minute int) Plan {
	if hour < 0 || hour > 23 || minute < 0 || minute > 59 {
		panic(fmt.Sprintf("schedule: %d:%02d is no time of a day", hour, minute))
	}
	return daily{day, hour, minute}
}

func (p daily) Next(after time.Time) time.Time {
	year, month, day := after.Date()
	for ; ; day++ {
		date := time.Date(year, month, day, 12, 0, 0, 0, time.UTC)
		if p.day != everyDay && p.day != date.Weekday() {
			continue
		}
		if slot, ok := p.on(date, after.Location()); ok && slot.After(after) {
			return slot
		}
	}
}

// on returns the slot of a date. There is none on a date that a place has left out, as Samoa has when it moved over the
// date line.
func (p daily) on(date time.Time, in *time.Location) (slot time.Time, ok bool) {
	year, month, day := date.Date()
	slot = time.Date(year, month, day, p.hour, p.minute, 0, 0, in) // when clocks change, one of two times, and it is not said which
	start, end := slot.ZoneBounds()
	wanted := time.Date(year, month, day, p.hour, p.minute, 0, 0, time.UTC)
	_, offset := slot.Zone()
	switch at := slot.Add(time.Duration(offset) * time.Second); { // what the clocks show
	case at.Before(wanted): // they skip it
		slot = end
	case at.After(wanted):
		slot = start
	case !start.IsZero():
		_, before := start.Add(-1).Zone()
		if first := slot.Add(time.Duration(offset-before) * time.Second); first.Before(start) && first.Before(slot) { // they show it twice
			slot = first
		}
	}
	return slot, slot.Day() == day
}

// located is a plan that gets all times in one location. It checks the plan's answers.
type located struct {
	plan     Plan
	location *time.Location
}

// next returns the first slot after a time, or the zero time if there is none.
func (p located) next(after time.Time) (time.Time, error) {
	slot := p.plan.Next(after.In(p.location))
	if !slot.IsZero() && !slot.After(after) {
		return time.Time{}, fmt.Errorf("schedule: %w: the plan's Next(%v) is %v, which is not later", tenure.ErrInvalid, after.In(p.location), slot)
	}
	if slot.UTC().Year() > 9998 { // JSON has four digits for it, in any zone
		return time.Time{}, fmt.Errorf("schedule: %w: the plan's Next(%v) is in the year %d: return the zero time if no slot follows", tenure.ErrInvalid, after.In(p.location), slot.Year())
	}
	return slot, nil
}

// isEmpty reports whether the plan never has a slot, and not only none any more.
func (p located) isEmpty() bool { return p.plan.Next(time.Unix(0, 0).In(p.location)).IsZero() }

// checkAnchor returns an error if the plan counts from the time that it is asked about. Each question, such as that of a
// retry, would then name other slots.
func (p located) checkAnchor(now time.Time) error {
	slot, err := p.next(now)
	if err != nil || slot.IsZero() {
		return nil // which Run tells
	}
	between := now.Add(slot.Sub(now) / 2)
	if other := p.plan.Next(between.In(p.location)); !other.Equal(slot) {
		return fmt.Errorf("%w: Plan counts from the time that it is asked about, as @every does: the first slot after %v is %v, and after %v it is %v: use Interval, or name the times, as a cron expression does",
			objects.ErrInvalid, now.In(p.location), slot, between.In(p.location), other)
	}
	return nil
}

// latest returns the last slot after one time and not after another, or the zero time if there
// is none. It searches backwards in growing steps, because there may be a million slots in between.
func (p located) latest(after, now time.Time) (last time.Time, err error) {
	const longest = 100 * 365 * 24 * time.Hour // twice as long is still a Duration
	for back := time.Second; last.IsZero() && now.After(after); back *= 2 {
		from := now.Add(-back)
		if from.Before(after) || back > longest {
			from = after
		}
		for slot := from; ; last = slot {
			if slot, err = p.next(slot); err != nil || slot.IsZero() || slot.After(now) {
				break
			}
		}
		if err != nil || from.Equal(after) {
			break
		}
	}
	return last, err
}
