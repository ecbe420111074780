//go:build unix

package kubetenure_test

import (
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/internal/testkit"
)

var model = (&porcupine.NondeterministicModel{Init: testkit.HistoryInit, Step: testkit.HistoryStep}).ToModel()

func judge(operations []testkit.Operation) porcupine.CheckResult {
	var history []porcupine.Operation
	for _, op := range operations {
		history = append(history, porcupine.Operation{ClientId: op.Caller, Call: int64(op.Sent), Output: op.Call, Return: int64(op.Answered)})
	}
	return porcupine.CheckOperationsTimeout(model, history, 20*time.Second)
}

// judgeAll fails the test unless all histories are linearizable.
func judgeAll(t *testing.T, log *testkit.History) {
	t.Helper()
	log.Tell(t)
	for _, history := range log.Histories() {
		require.Equal(t, porcupine.Ok, judge(history))
	}
}

func TestAHistoryThatIsNotLinearizableIsNoticed(t *testing.T) {
	for what, example := range testkit.HistoryExamples() {
		require.Equal(t, example.Linearizable, judge(example.History()) == porcupine.Ok, what)
	}
}
