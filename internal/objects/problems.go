package objects

import (
	"errors"
	"fmt"
	"time"
)

// Problems collects everything that is wrong with a config. The zero value is ready to use.
type Problems struct{ errs []error }

// If adds an [ErrInvalid] with the text if bad is true.
func (p *Problems) If(bad bool, format string, args ...any) {
	if bad {
		p.Add(fmt.Errorf("%w: "+format, append([]any{ErrInvalid}, args...)...))
	}
}

// Duration adds an [ErrInvalid] if a setting is not a duration that [ValidDuration] accepts.
func (p *Problems) Duration(name string, d time.Duration) {
	p.Add(ValidDuration(name, d, "time.Second"))
}

// ShortestDuration is the least duration of a setting. Whoever sets less has left out the unit, and would have the database
// asked thousands of times a second.
const ShortestDuration = time.Millisecond

// ValidDuration returns an [ErrInvalid] if a duration is negative, or if it is so short that its unit must have been
// left out. The unit is the likely one, as Go has it. Zero is valid: it stands for a default.
func ValidDuration(name string, d time.Duration, unit string) error {
	switch {
	case d < 0:
		return fmt.Errorf("%w: %s %v is negative", ErrInvalid, name, d)
	case d == 0 || d >= ShortestDuration:
		return nil
	case d >= 1000 && unit == "time.Second": // nobody waits for half an hour, given in seconds
		unit = "time.Millisecond"
	}
	return fmt.Errorf("%w: %s %v is below %v: did you mean %d*%s?", ErrInvalid, name, d, ShortestDuration, int64(d), unit)
}

// Add adds an error, unless it is nil.
func (p *Problems) Add(err error) {
	if err != nil {
		p.errs = append(p.errs, err)
	}
}

// Err returns all problems as one error, or nil if there are none.
func (p *Problems) Err() error { return errors.Join(p.errs...) }
