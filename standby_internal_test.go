package tenure

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestHowAStandbyWaitsAfterAnAttempt(t *testing.T) {
	const interval, ttl, late = 5 * time.Second, 30 * time.Second, 6 * time.Millisecond
	held := func(expiresIn time.Duration, byAge bool) error {
		return &HeldError{canExpireIn: expiresIn, byAge: byAge}
	}
	for name, test := range map[string]struct {
		err         error
		live        bool
		least, most time.Duration
		ignores     bool
	}{
		"held, hints are live":             {held(20*time.Second, true), true, 20 * time.Second, 20*time.Second + late, false},
		"held, no hints":                   {held(20*time.Second, true), false, interval * 3 / 4, interval, false},
		"held, and expires soon":           {held(time.Second, true), false, time.Second, time.Second + late, false},
		"held with another's TTL":          {held(time.Hour, true), true, ttl, ttl, false},
		"held by another program":          {held(20*time.Second, false), true, interval * 3 / 4, interval, false},
		"by another program, expires soon": {held(time.Second, false), true, time.Second, time.Second, false},
		"another was quicker":              {held(0, false), true, interval * 3 / 4, interval, false},
		"connection refused":               {errors.New("connection refused"), true, interval * 3 / 4, interval, false},
		"needs a person":                   {ErrSetup, true, ttl * 3 / 4, ttl, true},
		"not fit":                          {ErrUnhealthy, true, interval * 3 / 4, interval, true},
		"too slow":                         {ErrDeadline, true, interval * 3 / 4, interval, true},
	} {
		for range 100 {
			wait := afterAttempt(test.err, interval, ttl, test.live)
			require.GreaterOrEqual(t, wait.longest, test.least, name)
			require.LessOrEqual(t, wait.longest, test.most, name)
			require.Equal(t, test.ignores, wait.ignoreHints == wait.longest, name)
		}
	}
	require.LessOrEqual(t, afterAttempt(ErrSetup, interval, time.Hour, true).longest, time.Minute, "whatever the TTL")
}
