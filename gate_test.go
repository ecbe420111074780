package tenure_test

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
)

func TestAGateAdmitsNoTokenBelowTheHighestThatItHasSeen(t *testing.T) {
	var gate tenure.Gate
	for _, step := range []struct {
		token int64
		want  error
	}{{7, nil}, {7, nil}, {6, tenure.ErrLost}, {9, nil}, {7, tenure.ErrLost}, {9, nil}, {8, tenure.ErrLost}, {10, nil}} {
		require.ErrorIs(t, gate.Admit(step.token), step.want, "token %d", step.token)
	}
}

func TestAGateNeverGoesBackUnderConcurrency(t *testing.T) {
	var gate tenure.Gate
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for token := range int64(10_000) {
				if gate.Admit(token) == nil && gate.Admit(token-1) == nil {
					t.Errorf("admitted %d after %d", token-1, token)
				}
			}
		})
	}
	wg.Wait()
	require.ErrorIs(t, gate.Admit(9_998), tenure.ErrLost)
}
