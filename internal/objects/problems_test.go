package objects

import (
	"errors"
	"testing"
)

func TestAllProblemsAreOneErrorAndNoneIsNil(t *testing.T) {
	var problems Problems
	problems.If(false, "not this")
	problems.Add(nil)
	if err := problems.Err(); err != nil {
		t.Errorf("without problems the error is %v", err)
	}
	other := errors.New("other")
	problems.If(true, "Count %d is negative", -1)
	problems.Add(other)
	err := problems.Err()
	if !errors.Is(err, ErrInvalid) || !errors.Is(err, other) || err.Error() != "invalid argument: Count -1 is negative\nother" {
		t.Errorf("the error is %v", err)
	}
}
