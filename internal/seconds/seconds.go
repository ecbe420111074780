// Package seconds is the one place that decides how a status's durations appear in JSON.
package seconds

import (
	"encoding/json"
	"fmt"
	"math"
	"time"
)

// Duration is a number of seconds in JSON.
type Duration time.Duration

// In returns a view of a duration that JSON encodes and decodes in seconds.
func In(d *time.Duration) *Duration { return (*Duration)(d) }

func (d Duration) MarshalJSON() ([]byte, error) { return json.Marshal(time.Duration(d).Seconds()) }

// UnmarshalJSON reads what MarshalJSON writes, to the nanosecond.
func (d *Duration) UnmarshalJSON(data []byte) error {
	var seconds float64
	if err := json.Unmarshal(data, &seconds); err != nil {
		return err
	}
	nanos := math.Round(seconds * float64(time.Second))
	if math.Abs(nanos) >= math.MaxInt64 { // what a conversion makes of it depends on the processor
		return fmt.Errorf("%g seconds are more than %v", seconds, time.Duration(math.MaxInt64))
	}
	*d = Duration(nanos)
	return nil
}
