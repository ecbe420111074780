package seconds_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/tenurelib/tenure/internal/seconds"
)

func TestADurationIsANumberOfSecondsAndIsReadBack(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0:                             "0",
		29 * time.Second:              "29",
		1500 * time.Millisecond:       "1.5",
		time.Nanosecond:               "1e-9",
		-1234567891 * time.Nanosecond: "-1.234567891",
		24 * time.Hour:                "86400",
	} {
		var status struct {
			TTL *seconds.Duration `json:"ttl_seconds"`
		}
		status.TTL = seconds.In(&d)
		written, err := json.Marshal(status)
		if got := string(written); err != nil || got != `{"ttl_seconds":`+want+`}` {
			t.Errorf("%v is written as %s (%v)", d, got, err)
		}
		read := time.Hour
		status.TTL = seconds.In(&read)
		if err := json.Unmarshal(written, &status); err != nil || read != d {
			t.Errorf("%s is read as %v (%v), want %v", written, read, err, d)
		}
		for _, bad := range []string{`"1 s"`, `1e300`, `-1e300`, `9223372036.854775808`} {
			if err := json.Unmarshal([]byte(`{"ttl_seconds": `+bad+`}`), &status); err == nil || read != d {
				t.Errorf("%s is read as %v (%v)", bad, read, err)
			}
		}
	}
}
