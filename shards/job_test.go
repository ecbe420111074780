package shards

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/internal/report"
)

// That goroutine frees the shard before the process ends; otherwise the others would have to wait for the TTL.
func TestAPanicOfAFuncReachesTheGoroutineThatHoldsItsClaim(t *testing.T) {
	m := &Member{cfg: Config{Work: func(context.Context, string) error { panic("at the disco") }}}
	defer func() {
		p, _ := recover().(*report.Panic)
		require.NotNil(t, p)
		require.Equal(t, "at the disco", p.Value)
		require.Contains(t, string(p.Stack), "job_test.go")
	}()
	t.Error(m.work(t.Context(), "1"))
}
