package objects

import (
	"errors"
	"fmt"
)

// Problems collects everything that is wrong with a config. The zero value is ready to use.
type Problems struct{ errs []error }

// If adds an [ErrInvalid] with the text if bad is true.
func (p *Problems) If(bad bool, format string, args ...any) {
	if bad {
		p.Add(fmt.Errorf("%w: "+format, append([]any{ErrInvalid}, args...)...))
	}
}

// Add adds an error, unless it is nil.
func (p *Problems) Add(err error) {
	if err != nil {
		p.errs = append(p.errs, err)
	}
}

// Err returns all problems as one error, or nil if there are none.
func (p *Problems) Err() error { return errors.Join(p.errs...) }
