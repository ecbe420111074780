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
		err           error
		live, follows bool
		least, most   time.Duration
		ignores       bool
	}{
		"held, hints are live":                            {held(20*time.Second, true), true, false, 20 * time.Second, 20*time.Second + late, false},
		"held, no hints":                                  {held(20*time.Second, true), false, false, interval * 3 / 4, interval, false},
		"held, and expires soon":                          {held(time.Second, true), false, false, time.Second, time.Second + late, false},
		"held with another's TTL":                         {held(time.Hour, true), true, false, ttl, ttl, false},
		"held by another program":                         {held(20*time.Second, false), true, false, interval * 3 / 4, interval, false},
		"by another program, expires soon":                {held(time.Second, false), true, false, time.Second, time.Second, false},
		"only its silence counts, each renewal is seen":   {held(20*time.Second, false), true, true, 20 * time.Second, 20*time.Second + late, false},
		"only its silence counts, and no renewal is seen": {held(20*time.Second, false), false, false, interval * 3 / 4, interval, false},
		"another was quicker":                             {held(0, false), true, false, interval * 3 / 4, interval, false},
		"connection refused":                              {errors.New("connection refused"), true, false, interval * 3 / 4, interval, false},
		"needs a person":                                  {ErrSetup, true, false, ttl * 3 / 4, ttl, true},
		"not fit":                                         {ErrUnhealthy, true, false, interval * 3 / 4, interval, true},
		"too slow":                                        {ErrDeadline, true, false, interval * 3 / 4, interval, true},
	} {
		for range 100 {
			wait := afterAttempt(test.err, interval, ttl, test.live, test.follows)
			require.GreaterOrEqual(t, wait.longest, test.least, name)
			require.LessOrEqual(t, wait.longest, test.most, name)
			require.Equal(t, test.ignores, wait.ignoreHints == wait.longest, name)
		}
	}
	require.LessOrEqual(t, afterAttempt(ErrSetup, interval, time.Hour, true, true).longest, time.Minute, "whatever the TTL")
}
